"""What a training asks of a device, before it is ported: it runs on shapes alone, and a table says what the device has."""

from trueup.migration.assess.assessing import Assessment, Operator, assess, assess_capture
from trueup.migration.assess.support import Grade

__all__ = ["Assessment", "Grade", "Operator", "assess", "assess_capture"]
