from setuptools import setup

setup()  # pyproject.toml has all of it
