"""Clients that come and go for a long time: is everything given back?"""
