"""What is wrong with a Transformer: an audit of any module, by measurements that need no second model."""

from .audit_report import Answer, Audit, Mistake
from .run import assert_healthy, audit, audit_config
from .subject import AuditError

__all__ = ["Answer", "Audit", "AuditError", "Mistake", "assert_healthy", "audit", "audit_config"]
