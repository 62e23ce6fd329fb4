"""Talk to MySQL and MariaDB through asyncmy."""
