// What all launchers share.
#pragma once

#include "launch.h"
#include "platform.h"

namespace mt {

inline Stream stream_of(void* stream) { return static_cast<Stream>(stream); }
inline int launched() { return static_cast<int>(MT_RT(GetLastError)()); }

}  // namespace mt
