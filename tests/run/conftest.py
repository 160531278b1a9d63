"""Programs that call `run`, for all tests of it."""

from helpers.guest import guest as guest
