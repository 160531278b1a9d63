"""The values that the public API returns and accepts."""
