"""The spend ledger: every model call once, in SQLite or PostgreSQL.

Nothing outside this package knows SQLAlchemy.
"""
