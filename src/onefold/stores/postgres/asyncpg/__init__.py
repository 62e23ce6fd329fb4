"""Reach PostgreSQL through asyncpg."""
