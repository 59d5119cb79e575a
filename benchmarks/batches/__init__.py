"""A batch on a real model under online load, killed at random: is every line answered once?"""
