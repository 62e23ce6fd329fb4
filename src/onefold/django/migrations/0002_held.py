"""Version 2: an index to find held records among millions."""

from __future__ import annotations

from django.db import migrations

from onefold.django.operations import BringTablesTo


class Migration(migrations.Migration):  # type: ignore[misc]
    dependencies = (("onefold", "0001_records"),)
    operations = (BringTablesTo(2),)
