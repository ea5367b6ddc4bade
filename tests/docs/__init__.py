"""Tests of what the documentation is made with."""
