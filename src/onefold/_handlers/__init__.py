"""Call a user's function: bind its arguments, run its steps, read what it returns."""
