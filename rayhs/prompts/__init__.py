"""Prompts: found, read, tokenised and masked, one row at a time. No Ray here."""
