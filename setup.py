from setuptools import setup

setup()  # everything is said in pyproject.toml; this serves tools that still ask for a setup.py
