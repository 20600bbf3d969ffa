"""The balances read model: users, offers, and every grab as it stands."""
