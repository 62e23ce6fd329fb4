"""A Django app whose migrations create the tables: add "onefold.django" to INSTALLED_APPS, and run `migrate onefold`.

It has no models: only the guard writes records.
"""
