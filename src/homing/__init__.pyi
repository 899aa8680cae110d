from homing.api.model import Model as Model
from homing.api.model import load as load
from homing.api.run import Run as Run
from homing.api.run import offers as offers
from homing.api.run import runs as runs
from homing.errors import DataError as DataError
from homing.errors import HomingError as HomingError
from homing.errors import IntegrityError as IntegrityError
from homing.errors import LimitReached as LimitReached
from homing.errors import MissingExtra as MissingExtra
from homing.errors import NoOffer as NoOffer
from homing.errors import ProviderRefused as ProviderRefused
from homing.errors import RunFailed as RunFailed
from homing.errors import RunFileError as RunFileError
from homing.errors import StillBilling as StillBilling
from homing.errors import StoreError as StoreError
from homing.errors import UsageError as UsageError

__version__: str
