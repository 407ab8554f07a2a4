// Functions of the driver interface by name.
#pragma once

namespace standin {

// What stands for it here; for a name that is not modelled, a function that stops and tells the name.
void* entry_point(const char* name);

int device_attribute(int attribute, int device);

}  // namespace standin
