"""Reach PostgreSQL through psycopg 3, sync and async."""
