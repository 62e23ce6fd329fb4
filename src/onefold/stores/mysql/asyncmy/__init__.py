"""Reach MySQL and MariaDB through asyncmy."""
