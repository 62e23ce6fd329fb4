"""Queues and job frameworks, guarded when a message is consumed: that is where a duplicate does its damage."""
