"""Run ASGI applications inside a claim, and let them finish after their clients have gone."""
