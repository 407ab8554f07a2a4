"""Compile-time: programs in, slots and plans out."""
