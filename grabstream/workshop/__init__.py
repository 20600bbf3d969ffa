"""What developers and tests use, and no operator runs in production: local servers, rehearsals with their
verdict, a payment provider that moves no money, and the schemas of a release.
"""
