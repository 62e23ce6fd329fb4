"""Reach MySQL and MariaDB through PyMySQL."""
