"""Share the rules of RabbitMQ between its clients: consuming, and messages."""
