"""Access to PostgreSQL: sessions, locks, migrations, arrays, and the schemas of a system."""
