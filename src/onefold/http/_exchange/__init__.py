"""Turn one request into one delivery, whatever the framework: what is asked, refused, and answered."""
