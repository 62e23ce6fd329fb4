"""Compose the statements of MySQL and MariaDB: fragments, literals, and the renewal of claims."""
