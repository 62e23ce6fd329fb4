"""Version 1: the records, and the version of the tables."""

from __future__ import annotations

from django.db import migrations

from onefold.django.operations import BringTablesTo


class Migration(migrations.Migration):  # type: ignore[misc]
    initial = True
    dependencies = ()
    operations = (BringTablesTo(1),)
