"""Turn one request into one delivery, for every framework: what is asked, refused, and answered."""
