"""Webhooks: events of the journal are sent to URLs that subscribed to them."""
