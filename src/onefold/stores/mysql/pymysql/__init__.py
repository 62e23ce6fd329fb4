"""Talk to MySQL and MariaDB through PyMySQL."""
