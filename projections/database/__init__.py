"""PostgreSQL itself: sessions, locks, migrations, arrays, and which schema belongs to which system."""
