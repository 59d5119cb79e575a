"""Revisions, oldest first by number. One that was released is never changed."""
