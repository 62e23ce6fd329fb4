"""Share the rules of RabbitMQ between its clients: consuming, and what each client calls a message."""
