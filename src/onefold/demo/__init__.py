"""`onefold demo`: demonstrate the double charge. The command is in `command`.

Every process of the demo imports this package, so nothing is imported here.
"""
