from tests.support.rooms import *  # noqa: F403 - fixtures
