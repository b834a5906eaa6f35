"""A pytest plugin: hypothesis stops at its first failing example. Looking for a smaller one takes it a minute."""

from hypothesis import Phase, settings

settings.register_profile("first_failure", phases=(Phase.explicit, Phase.generate), report_multiple_bugs=False)
settings.load_profile("first_failure")
