"""The verbs of the workshop: local servers, the rehearsal, and the payment provider for tests."""
