"""The fixture `guest`, which makes programs that call `run`."""

from helpers.guest import guest as guest
