// Functions of the driver interface, found by name.
#pragma once

namespace standin {

// Returns the stand-in's function of this name. For an unknown name, the returned function stops the process
// and prints the name.
void* entry_point(const char* name);

int device_attribute(int attribute, int device);

}  // namespace standin
