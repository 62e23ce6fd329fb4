"""Guard queues and job frameworks when a message is consumed: that is where a duplicate does its damage."""
