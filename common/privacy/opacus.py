"""What is used of Opacus, imported without the handler that it gives the root logger, which repeats each line of ours.

Only imported where privacy is accounted for, or examples are protected: it takes some seconds.
"""

import logging

_ROOT = logging.getLogger()
_BEFORE = list(_ROOT.handlers), _ROOT.level
try:
    from opacus.accountants import PRVAccountant, RDPAccountant
    from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV, compute_safe_domain_size
    from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent
    from opacus.grad_sample.conv import compute_conv_grad_sample
finally:
    _ROOT.handlers[:] = _BEFORE[0]
    _ROOT.setLevel(_BEFORE[1])

__all__ = [
    "PRVAccountant",
    "PoissonSubsampledGaussianPRV",
    "RDPAccountant",
    "compute_conv_grad_sample",
    "compute_rdp",
    "compute_safe_domain_size",
    "get_privacy_spent",
]
