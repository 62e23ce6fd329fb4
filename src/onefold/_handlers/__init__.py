"""Call a user's function: bind its arguments, run its steps, check what it returns."""
