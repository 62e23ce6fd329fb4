"""What is measured and soaked: kept apart from the tests, because it takes its time."""
