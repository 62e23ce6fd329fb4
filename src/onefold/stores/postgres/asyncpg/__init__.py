"""Talk to PostgreSQL through asyncpg."""
