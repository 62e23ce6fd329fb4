"""`onefold demo`: the double charge, made real. The command is in `command`.

Every process of the demo imports this package, so that nothing is imported here.
"""
