"""Turn one request into one delivery, for every framework: the request to the guard, refusals and responses."""
