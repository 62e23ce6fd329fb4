"""A Django app whose migrations make the tables: put "onefold.django" into INSTALLED_APPS, and run `migrate onefold`.

It has no models: records are written by the guard, and by nothing else.
"""
