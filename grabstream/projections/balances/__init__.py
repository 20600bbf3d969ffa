"""The read model `balances`: balances of users, and the current state of offers, grabs and payments."""
