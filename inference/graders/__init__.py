"""Graders: pure functions from an answer's text to what it says, bounded in time by the shape of what they accept."""
