// Subscribes with the client of the JavaScript SDK and prints each event as one line of JSON,
// then how the stream ended: node subscribe.mjs ADDRESS BINDING TASK

import { TaskState } from '@a2a-js/sdk';
import { ClientFactory, ClientFactoryOptions } from '@a2a-js/sdk/client';

const [address, binding, id] = process.argv.slice(2);
const tell = (words) => console.log(JSON.stringify(words));
const factory = new ClientFactory({ ...ClientFactoryOptions.default, preferredTransports: [binding] });

try {
  const client = await factory.createFromUrl(address);
  for await (const { payload } of client.resubscribeTask({ id, tenant: '' })) {
    const { status, artifact } = payload.value;
    tell([payload.$case, artifact?.artifactId ?? TaskState[status.state]]);
  }
  tell(['closed', '']);
} catch (error) {
  tell(['error', error.name]);
}
