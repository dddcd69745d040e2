"""Settings for Django, without which no model can be imported."""

import django
from django.conf import settings

if not settings.configured:
    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        LOGGING_CONFIG=None,
        SECRET_KEY="of a test",
        USE_TZ=True,
    )
    django.setup()
