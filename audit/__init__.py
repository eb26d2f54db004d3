"""Audits that find defects of any Transformer module by measurements, without a second model."""

from ..backend.submodules import lazy_attributes
from .audit_report import Answer, Audit, Mistake
from .run import assert_healthy, audit, audit_config
from .subject import AuditError

__all__ = ["Answer", "Audit", "AuditError", "Mistake", "assert_healthy", "audit", "audit_config"]

__getattr__ = lazy_attributes(__name__)
